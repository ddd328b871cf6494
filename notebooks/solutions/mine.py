"""The kernel that the lessons build, as the solutions write it."""


def step(S, r, k, v, w, u):
    table = k[:, None] * v
    o = len(k) ** -0.5 * (r @ (S + u[:, None] * table))
    S = w.exp()[:, None] * S + table
    return o, S


def step_back(D, r, w, do):
    return w.exp()[:, None] * D + len(r) ** -0.5 * r[:, None] * do


def diagnose(one, other):
    x, y = other.double().flatten(), one.double().flatten()
    factor = (x @ y) / (x @ x)
    rest = y - factor * x
    return factor, rest.norm() / y.norm()
