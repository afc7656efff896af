"""Generators of the bundled model, its tokenizer and its dataset; not part of the installed package."""
