"""Texts, tokenizer, token files and samples."""
