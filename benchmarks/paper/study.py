"""The experiment of Shin et al. 2024 over batch sizes and strategies. `pytest.ini` has its settings."""


def test_hellaswag(llm, hellaswag, batch_size, measure):
    """A strategy scores HellaSwag at one batch size as lm-evaluation-harness does."""
    measure(llm, hellaswag, batch_size)
