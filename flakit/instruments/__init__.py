"""Instruments for kernel authors: what they point at any linear-attention kernel, and what draws it."""
