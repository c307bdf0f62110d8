r"""Passes through tanh networks, with the derivatives of equations, compiled for the processor by numba.

Each unit of a layer has one long row of numbers: the values at some points, then their slopes and curvatures along the
axes (see `fipa.pde.jet`), points innermost. Rows of a layer are mixed by its weights, whatever they stand for; biases
and tanh treat them apart. Points come in blocks that stay in the cache.

A block of a layer with m units is (m, c b): c components of b points, the values first.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LOOSE = {"contract", "reassoc"}  # sums in any order, and products within them; NaN stays NaN
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693147180369123816490, 1.90821492927058770002e-10
SHIFT = 6755399441055744.0  # 1.5 * 2^52: the last bits of a number plus this are the nearest whole number
EDGE = 0.625  # below that tanh is a quotient of polynomials (Cephes), above it comes from exp


@njit(fastmath=LOOSE, cache=True)
def _mix(w, x, y):  # type: ignore[no-untyped-def]
    """The rows y = w x, two of them from four rows of x at a time."""
    (rows, inputs), n = w.shape, x.shape[1]
    y[:] = 0.0
    for j in range(0, rows, 2):
        k = min(j + 1, rows - 1)
        y0, y1, v, u, i = y[j], y[k], w[j], w[k], 0
        if k == j:
            y1 = np.zeros(n)  # of an odd number of rows, the last goes alone
        while i + 4 <= inputs:
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            v0, v1, v2, v3 = v[i], v[i + 1], v[i + 2], v[i + 3]
            u0, u1, u2, u3 = u[i], u[i + 1], u[i + 2], u[i + 3]
            for t in range(n):
                p0, p1, p2, p3 = x0[t], x1[t], x2[t], x3[t]
                y0[t] += v0 * p0 + v1 * p1 + v2 * p2 + v3 * p3
                y1[t] += u0 * p0 + u1 * p1 + u2 * p2 + u3 * p3
            i += 4
        while i < inputs:
            x0, v0, u0 = x[i], v[i], u[i]
            for t in range(n):
                y0[t] += v0 * x0[t]
                y1[t] += u0 * x0[t]
            i += 1


@njit(fastmath=LOOSE, cache=True)
def _products(g, x, w):  # type: ignore[no-untyped-def]
    """Add to w the scalar products of all rows of g with all rows of x, eight at a time."""
    rows, inputs, n = g.shape[0], x.shape[0], x.shape[1]
    for j in range(0, rows, 2):
        k = min(j + 1, rows - 1)
        g0, g1, i = g[j], g[k], 0
        while i + 4 <= inputs:
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            a0, a1, a2, a3, b0, b1, b2, b3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for t in range(n):
                p, q, p0, p1, p2, p3 = g0[t], g1[t], x0[t], x1[t], x2[t], x3[t]
                a0, a1, a2, a3 = a0 + p * p0, a1 + p * p1, a2 + p * p2, a3 + p * p3
                b0, b1, b2, b3 = b0 + q * p0, b1 + q * p1, b2 + q * p2, b3 + q * p3
            _into(w[j], i, a0, a1, a2, a3)
            if k > j:
                _into(w[k], i, b0, b1, b2, b3)
            i += 4
        while i < inputs:
            x0, a0, b0 = x[i], 0.0, 0.0
            for t in range(n):
                a0, b0 = a0 + g0[t] * x0[t], b0 + g1[t] * x0[t]
            w[j, i] += a0
            if k > j:
                w[k, i] += b0
            i += 1


@njit(cache=True)
def _into(row, i, a, b, c, d):  # type: ignore[no-untyped-def]
    row[i] += a
    row[i + 1] += b
    row[i + 2] += c
    row[i + 3] += d


@njit(fastmath={"contract"}, cache=True)
def tanh(y, z, spare):  # type: ignore[no-untyped-def]
    """The tanh z of y, to three units in the last place; NaN stays NaN. `spare` is as long."""
    n, bits = len(y), spare.view(np.int64)
    for t in range(n):
        x = 2.0 * min(max(y[t], -30.0), 30.0)
        shifted = x * LOG2E + SHIFT
        k = shifted - SHIFT
        r = (x - k * LN2_HIGH) - k * LN2_LOW
        p = (1.6059043836821613e-10 * r + 2.08767569878681e-09) * r + 2.505210838544172e-08
        p = ((p * r + 2.755731922398589e-07) * r + 2.7557319223985893e-06) * r + 2.48015873015873e-05
        p = ((p * r + 1.984126984126984e-04) * r + 1.388888888888889e-03) * r + 8.333333333333333e-03
        p = ((p * r + 4.1666666666666664e-02) * r + 1.6666666666666666e-01) * r + 0.5
        z[t] = (p * r + 1.0) * r + 1.0  # exp(r)
        spare[t] = shifted
    for t in range(n):
        bits[t] = (bits[t] + 1023) << 52  # of 2^k
    for t in range(n):
        x = y[t]
        s = x * x
        p = (-9.64399179425052238628e-1 * s - 9.92877231001918586564e1) * s - 1.61468768441708447952e3
        q = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s + 4.84406305325125486048e3
        far = abs(x) >= EDGE
        ratio = (2.0 if far else p) / (z[t] * spare[t] + 1.0 if far else q)  # one division takes as long as all else
        z[t] = 1.0 - ratio if far else x + x * s * ratio


@njit(fastmath=LOOSE, cache=True)
def _activate(y, z, b, axes, curved):  # type: ignore[no-untyped-def]
    """Slopes and curvatures z of tanh(y), whose values are in z already; `curved` 1 is for their sum."""
    for j in range(y.shape[0]):
        value = z[j, :b]
        for i in range(axes):
            along, out = y[j, (1 + i) * b : (2 + i) * b], z[j, (1 + i) * b : (2 + i) * b]
            for t in range(b):
                out[t] = (1.0 - value[t] * value[t]) * along[t]
        for i in range(curved):
            place = (1 + axes + i) * b
            bent, out = y[j, place : place + b], z[j, place : place + b]
            for t in range(b):
                out[t] = 0.0
            for a in range(axes if curved == 1 else 1):
                along = y[j, (1 + i + a) * b : (2 + i + a) * b]
                for t in range(b):
                    out[t] += along[t] * along[t]
            for t in range(b):
                out[t] = (1.0 - value[t] * value[t]) * (bent[t] - 2.0 * value[t] * out[t])


@njit(fastmath=LOOSE, cache=True)
def _deactivate(y, z, g, b, axes, curved, spare):  # type: ignore[no-untyped-def]
    r"""From slopes g of the loss at tanh's results z to those at its arguments y, in place; `spare` is (2, b).

    With $t$ the value, $s = 1 - t^2$, squares $P = \sum_i y_i^2$ and $m = c - 2 t P$, the results are $s y_i$ and
    $s m$; a slope $\bar v$ at the latter adds $2 y_i (-2 t s \bar v)$ at $y_i$ and $-2 t m \bar v - 2 P s \bar v$ at t.
    """
    total, squares = spare[0], spare[1]
    for j in range(y.shape[0]):
        value = z[j, :b]
        for t in range(b):
            total[t] = g[j, t]
        for i in range(axes):
            along, slope = y[j, (1 + i) * b : (2 + i) * b], g[j, (1 + i) * b : (2 + i) * b]
            for t in range(b):
                total[t] -= 2.0 * value[t] * slope[t] * along[t]
                slope[t] *= 1.0 - value[t] * value[t]
        for i in range(curved):
            place, last = (1 + axes + i) * b, axes if curved == 1 else 1
            bent, slope = y[j, place : place + b], g[j, place : place + b]
            for t in range(b):
                squares[t] = 0.0
            for a in range(last):
                along, below = y[j, (1 + i + a) * b : (2 + i + a) * b], g[j, (1 + i + a) * b : (2 + i + a) * b]
                for t in range(b):
                    squares[t] += along[t] * along[t]
                    below[t] -= 4.0 * value[t] * (1.0 - value[t] * value[t]) * slope[t] * along[t]
            for t in range(b):
                s, v = 1.0 - value[t] * value[t], slope[t]
                total[t] -= 2.0 * v * (value[t] * (bent[t] - 2.0 * value[t] * squares[t]) + squares[t] * s)
                slope[t] = s * v
        for t in range(b):
            g[j, t] = total[t] * (1.0 - value[t] * value[t])


@njit(cache=True)
def _through(flat, widths, x, sums, results, b, axes, curved, spare):  # type: ignore[no-untyped-def]
    """One block x (inputs, c b) through all layers, one below the other in sums and results (units, c b)."""
    incoming, start, above = x, 0, 0
    for i in range(len(widths) - 1):
        inputs, units = widths[i], widths[i + 1]
        y, z = sums[above : above + units], results[above : above + units]
        _mix(flat[start : start + inputs * units].reshape(units, inputs), incoming, y)
        start += inputs * units
        for j in range(units):
            y[j, :b] += flat[start + j]
            if i + 2 < len(widths):
                tanh(y[j, :b], z[j, :b], spare)
        if i + 2 < len(widths):
            _activate(y, z, b, axes, curved)
        start, above, incoming = start + units, above + units, z


@njit(cache=True)
def forward(flat, widths, x, sums, results, out, b, axes, curved):  # type: ignore[no-untyped-def]
    """Run blocks x (m, blocks, inputs, c b) of m networks through all layers, into out (m, blocks, outputs, c b).

    `sums` and `results` (m, kept, units, c b) are what goes into and comes out of tanh: of all blocks, or of one.
    """
    spare = np.empty(b)
    for m in range(len(x)):
        for block in range(x.shape[1]):
            y, z = sums[m, block % sums.shape[1]], results[m, block % sums.shape[1]]
            _through(flat[m], widths, x[m, block], y, z, b, axes, curved, spare)
            out[m, block] = y[-out.shape[2] :]


@njit(cache=True)
def backward(flat, widths, x, sums, results, slopes, b, axes, curved, into):  # type: ignore[no-untyped-def]
    """Add to `into` (m, p) the gradients, from slopes (m, blocks, outputs, c b) at the last layer's sums.

    Blocks that were not kept go forward once more: that is faster than memory which no cache holds.
    """
    spare = np.empty((2, b))
    for m in range(len(x)):
        for block in range(x.shape[1]):
            y, z = sums[m, block % sums.shape[1]], results[m, block % sums.shape[1]]
            if sums.shape[1] < x.shape[1]:
                _through(flat[m], widths, x[m, block], y, z, b, axes, curved, spare[0])
            _back(flat[m], widths, x[m, block], y, z, slopes[m, block], b, axes, curved, into[m], spare)


@njit(cache=True)
def _back(flat, widths, x, sums, results, slopes, b, axes, curved, into, spare):  # type: ignore[no-untyped-def]
    """One block back through all layers."""
    above, start, g = len(sums), len(flat), slopes
    for i in range(len(widths) - 2, -1, -1):
        inputs, units = widths[i], widths[i + 1]
        above, start = above - units, start - units
        for j in range(units):
            into[start + j] += g[j, :b].sum()
        start -= inputs * units
        incoming = results[above - inputs : above] if i else x
        _products(g, incoming, into[start : start + inputs * units].reshape(units, inputs))
        if i:
            weight = flat[start : start + inputs * units].reshape(units, inputs)
            below = np.empty((inputs, x.shape[1]))
            _mix(np.ascontiguousarray(weight.T), g, below)
            _deactivate(sums[above - inputs : above], incoming, below, b, axes, curved, spare)
            g = below
