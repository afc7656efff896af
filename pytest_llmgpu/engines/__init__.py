"""Engines: other people's code that scores or generates token ids by itself; `protocol` is the contract."""
