"""Instruments for any operator of the table in `operators`: inputs, float64 truth, error measures, sweeps."""
