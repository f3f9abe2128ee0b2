"""Prompts on one GPU: library matrix products and attention, and the paged KV pool they fill.

The pool is what the decode kernel reads. Must not know text, files or requests.
"""
