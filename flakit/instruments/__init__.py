"""Instruments for kernel authors, which work on any linear-attention kernel, and their reports."""
