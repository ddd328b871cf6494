"""Small pictures with one or two knobs, for the sentence of a lesson that needs them: a module a lesson.

Arrays in; each says itself in words. What computes the arrays, and the knobs, are in panels/sketches/, named alike.
"""
