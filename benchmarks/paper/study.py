"""The study's experiment, over batch sizes and strategies; `pytest.ini` beside it has its settings."""


def test_hellaswag(llm, hellaswag, batch_size, measure):
    """A strategy scores HellaSwag at one batch size as the study's harness did."""
    measure(llm, hellaswag, batch_size)
