r"""Convolutions with few channels, compiled for the processor by numba.

Libraries for convolutions fill vector registers with channels. The paper's CNNs have 4 to 48 of them, so most of a
register is empty. Here the images of a batch are innermost in memory, (channels, rows, columns, images), and registers
are filled with those: a row of an image's columns and all images of the batch is one long vector.

Inputs of convolutions carry a border of zeros, one pixel wide; columns and images share one axis.
"""

from __future__ import annotations

import numpy as np
from numba import njit

F, INT = np.float32, np.int32


@njit(fastmath=True, cache=True)
def convolve(x, w, y, n):  # type: ignore[no-untyped-def]
    """Y (out, H, W n) = 3x3 convolution of x (in, H + 2, (W + 2) n) with w (out, in, 3, 3), for n images."""
    m = y.shape[2]
    for c in range(y.shape[0]):
        for h in range(y.shape[1]):
            row = y[c, h]
            for k in range(x.shape[0]):
                f, top, mid, low = w[c, k], x[k, h], x[k, h + 1], x[k, h + 2]
                f00, f01, f02, a0, a1, a2 = f[0, 0], f[0, 1], f[0, 2], top[:m], top[n : n + m], top[2 * n :]
                f10, f11, f12, b0, b1, b2 = f[1, 0], f[1, 1], f[1, 2], mid[:m], mid[n : n + m], mid[2 * n :]
                f20, f21, f22, c0, c1, c2 = f[2, 0], f[2, 1], f[2, 2], low[:m], low[n : n + m], low[2 * n :]
                if k == 0:
                    row[:] = 0
                for t in range(m):  # one pass over the row for all nine weights
                    row[t] += (
                        f00 * a0[t] + f01 * a1[t] + f02 * a2[t]
                        + f10 * b0[t] + f11 * b1[t] + f12 * b2[t]
                        + f20 * c0[t] + f21 * c1[t] + f22 * c2[t]
                    )  # fmt: skip


@njit(fastmath=True, cache=True)
def convolve_gradient(x, dy, dw, n):  # type: ignore[no-untyped-def]
    """Gradient (out, in, 3, 3) of `convolve` in its weights; dy has a border like x."""
    m = dy.shape[2] - 2 * n
    for c in range(dy.shape[0]):
        for k in range(x.shape[0]):
            for i in range(3):
                s0, s1, s2 = F(0), F(0), F(0)
                for h in range(dy.shape[1] - 2):
                    g, row = dy[c, h + 1, n : n + m], x[k, h + i]
                    a, b, d = row[:m], row[n : n + m], row[2 * n :]
                    for t in range(m):
                        s0 += g[t] * a[t]
                        s1 += g[t] * b[t]
                        s2 += g[t] * d[t]
                dw[c, k, i, 0], dw[c, k, i, 1], dw[c, k, i, 2] = s0, s1, s2


@njit(fastmath=True, cache=True)
def pool(y, z, place, n, border):  # type: ignore[no-untyped-def]
    """Z = the largest of each 2x2 square of y, or 0, at an offset of `border`; place: which of the four, 4 for none."""
    for c in range(place.shape[0]):
        for h in range(place.shape[1]):
            for w in range(place.shape[2] // n):
                u, v = slice(2 * w * n, (2 * w + 1) * n), slice((2 * w + 1) * n, (2 * w + 2) * n)
                y0, y1, y2, y3 = y[c, 2 * h, u], y[c, 2 * h, v], y[c, 2 * h + 1, u], y[c, 2 * h + 1, v]
                out, which = z[c, h + border, (w + border) * n :], place[c, h, w * n :]
                for t in range(n):
                    best, k = F(0), INT(4)
                    k = INT(0) if y0[t] > best else k
                    best = max(best, y0[t])
                    k = INT(1) if y1[t] > best else k
                    best = max(best, y1[t])
                    k = INT(2) if y2[t] > best else k
                    best = max(best, y2[t])
                    k = INT(3) if y3[t] > best else k
                    out[t] = max(best, y3[t])
                    which[t] = k


@njit(fastmath=True, cache=True)
def pool_gradient(dz, place, dy, n):  # type: ignore[no-untyped-def]
    """Gradient of `pool` in y, into the inside of dy, which has a border."""
    for c in range(place.shape[0]):
        for h in range(place.shape[1]):
            for w in range(place.shape[2] // n):
                u, v = slice((2 * w + 1) * n, (2 * w + 2) * n), slice((2 * w + 2) * n, (2 * w + 3) * n)
                d0, d1, d2, d3 = dy[c, 2 * h + 1, u], dy[c, 2 * h + 1, v], dy[c, 2 * h + 2, u], dy[c, 2 * h + 2, v]
                g, which = dz[c, h, w * n :], place[c, h, w * n :]
                for t in range(n):
                    d0[t] = g[t] if which[t] == 0 else F(0)
                    d1[t] = g[t] if which[t] == 1 else F(0)
                    d2[t] = g[t] if which[t] == 2 else F(0)
                    d3[t] = g[t] if which[t] == 3 else F(0)


@njit(fastmath=True, cache=True)
def rectify(y, z, n, border):  # type: ignore[no-untyped-def]
    """Z = max(y, 0), at an offset of `border`."""
    for c in range(y.shape[0]):
        for h in range(y.shape[1]):
            a, b = y[c, h], z[c, h + border, border * n :]
            for t in range(a.shape[0]):
                b[t] = max(a[t], F(0))


@njit(fastmath=True, cache=True)
def rectify_gradient(dz, y, dy, n):  # type: ignore[no-untyped-def]
    """Gradient of `rectify` in y, into the inside of dy, which has a border."""
    for c in range(y.shape[0]):
        for h in range(y.shape[1]):
            a, g, d = y[c, h], dz[c, h], dy[c, h + 1, n:]
            for t in range(a.shape[0]):
                d[t] = g[t] if a[t] > 0 else F(0)


@njit(fastmath=True, cache=True)
def images_last(x, index, rows, columns, z):  # type: ignore[no-untyped-def]
    """The inside of z (channels, H + 2, (W + 2) n) = n images of x (all, H, W, channels), ten at a time.

    Image t shows the pixels of x[index[t]] at its own `rows` (n, H) and `columns` (n, W).
    """
    n, (_, height, width, channels) = len(index), x.shape
    pixels = x.reshape(-1)
    begin = np.empty(10, np.uint64)  # unsigned: no test whether to count from the end
    for start in range(0, n, 10):
        size = min(10, n - start)
        for h in range(height):
            for t in range(size):
                begin[t] = np.uint64(((index[start + t] * height + rows[start + t, h]) * width) * channels)
            for w in range(width):
                for t in range(size):
                    place = begin[t] + np.uint64(columns[start + t, w] * channels)
                    for c in range(channels):
                        z[c, h + 1, (w + 1) * n + start + t] = pixels[place + np.uint64(c)]
