"""Measure LLM inference over batch sizes: time, accuracy, communication and memory of every strategy.

Run it with `pytest benchmarks`; `pytest --help` lists the options. Copy it into your own repository.
"""


def test_hellaswag(llm, hellaswag, batch_size, measure):
    """The model answers HellaSwag as well as its baseline, at this batch size under this strategy."""
    measure(llm, hellaswag, batch_size)
