"""The casebook: real failures, one module each, with the faulty and the correct computation side by side.

The docstring of each module compares the failure as reported and as measured. The module has a `law` that predicts from
the parameters where it begins, `reproduce()`, which measures the reported numbers again, and `show(**knobs)` for one
setting. `registry` lists the cases, `flakit cases` runs them. Faulty code exists nowhere else in flakit.
"""
