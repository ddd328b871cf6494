"""Instruments for any operator: realistic inputs, float64 truth, error measures, sweeps.

One module an instrument: `operators` (the list of operators), `inputs`, `evaluate`, `errors`, `sweep`.
"""
