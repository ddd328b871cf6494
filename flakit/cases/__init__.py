"""The casebook: real failures, one module each, the faulty and the right computation side by side.

Every module tells the story as it was told and as it measures, has knobs, a `law` that predicts the onset from the
parameters, and `reproduce()`, which measures the numbers of the story again. A fault is written here and nowhere else.
"""
