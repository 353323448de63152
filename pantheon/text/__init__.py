"""Tokens and prompts: vocabulary to tokenizer, messages to prompt text.

This package sees a metadata mapping, never a file, and knows no model and no request.
"""
