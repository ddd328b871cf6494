"""Sketches, small pictures with one or two knobs that illustrate a sentence of a lesson: a module per lesson.

Each is a `Drawing`. The knobs, and the functions that compute the arrays, are in panels/sketches/, named alike.
"""
