"""Generators of the bundled model, its tokenizer and its dataset. The installed package does not have them."""
