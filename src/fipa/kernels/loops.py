r"""Convolutions with few channels, compiled for the processor by numba.

Libraries for convolutions fill vector registers with channels. The paper's CNNs have 4 to 48 of them, so most of a
register is empty. Here the images of a batch are innermost in memory, (channels, rows, columns, images), and registers
are filled with those: a row of an image's columns and all images of the batch is one long vector.

Inputs of convolutions carry a border of zeros, one pixel wide; columns and images share one axis.
"""

from __future__ import annotations

import numpy as np
from numba import njit

F, INT, UINT = np.float32, np.int32, np.uint64


@njit(cache=True)
def _shifted(rows, n, m):  # type: ignore[no-untyped-def]
    """What each of the nine weights of a 3x3 kernel is multiplied with, for one row of the output."""
    top, mid, low = rows[0], rows[1], rows[2]
    return (
        top[:m], top[n : n + m], top[2 * n :], mid[:m], mid[n : n + m], mid[2 * n :], low[:m], low[n : n + m],
        low[2 * n :],
    )  # fmt: skip


@njit(fastmath=True, cache=True)
def convolve(x, w, y, n):  # type: ignore[no-untyped-def]
    """Y (out, H, W n) = 3x3 convolution of x (in, H + 2, (W + 2) n) with w (out, in, 3, 3), for n images.

    Two channels in one pass, so that what is loaded of x is used twice.
    """
    channels, m = y.shape[0], y.shape[2]
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)  # an odd one out is its own partner
        for h in range(y.shape[1]):
            y0, y1 = y[c, h], y[d, h]
            y0[:] = 0
            y1[:] = 0
            for k in range(x.shape[0]):
                a, b = w[c, k], w[d, k]
                a0, a1, a2, a3, a4, a5, a6, a7, a8 = (
                    a[0, 0], a[0, 1], a[0, 2], a[1, 0], a[1, 1], a[1, 2], a[2, 0], a[2, 1], a[2, 2]
                )  # fmt: skip
                b0, b1, b2, b3, b4, b5, b6, b7, b8 = (
                    b[0, 0], b[0, 1], b[0, 2], b[1, 0], b[1, 1], b[1, 2], b[2, 0], b[2, 1], b[2, 2]
                )  # fmt: skip
                x0, x1, x2, x3, x4, x5, x6, x7, x8 = _shifted(x[k, h : h + 3], n, m)
                for t in range(m):
                    p0, p1, p2, p3, p4, p5, p6, p7, p8 = (
                        x0[t], x1[t], x2[t], x3[t], x4[t], x5[t], x6[t], x7[t], x8[t]
                    )  # fmt: skip
                    s = y0[t] + a0 * p0 + a1 * p1 + a2 * p2 + a3 * p3 + a4 * p4 + a5 * p5 + a6 * p6 + a7 * p7 + a8 * p8
                    u = y1[t] + b0 * p0 + b1 * p1 + b2 * p2 + b3 * p3 + b4 * p4 + b5 * p5 + b6 * p6 + b7 * p7 + b8 * p8
                    y0[t] = s
                    y1[t] = u


@njit(fastmath=True, cache=True)
def convolve_gradient(x, dy, dw, n):  # type: ignore[no-untyped-def]
    """Gradient (out, in, 3, 3) of `convolve` in its weights; dy has a border like x."""
    channels, m = dy.shape[0], dy.shape[2] - 2 * n
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for k in range(x.shape[0]):
            a0, a1, a2, a3, a4, a5, a6, a7, a8 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
            b0, b1, b2, b3, b4, b5, b6, b7, b8 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
            for h in range(dy.shape[1] - 2):
                g, f = dy[c, h + 1, n:], dy[d, h + 1, n:]
                x0, x1, x2, x3, x4, x5, x6, x7, x8 = _shifted(x[k, h : h + 3], n, m)
                for t in range(m):
                    p0, p1, p2, p3, p4, p5, p6, p7, p8 = (
                        x0[t], x1[t], x2[t], x3[t], x4[t], x5[t], x6[t], x7[t], x8[t]
                    )  # fmt: skip
                    s, u = g[t], f[t]
                    a0, a1, a2 = a0 + s * p0, a1 + s * p1, a2 + s * p2
                    a3, a4, a5 = a3 + s * p3, a4 + s * p4, a5 + s * p5
                    a6, a7, a8 = a6 + s * p6, a7 + s * p7, a8 + s * p8
                    b0, b1, b2 = b0 + u * p0, b1 + u * p1, b2 + u * p2
                    b3, b4, b5 = b3 + u * p3, b4 + u * p4, b5 + u * p5
                    b6, b7, b8 = b6 + u * p6, b7 + u * p7, b8 + u * p8
            a, b = dw[c, k], dw[d, k]
            a[0, 0], a[0, 1], a[0, 2], b[0, 0], b[0, 1], b[0, 2] = a0, a1, a2, b0, b1, b2
            a[1, 0], a[1, 1], a[1, 2], b[1, 0], b[1, 1], b[1, 2] = a3, a4, a5, b3, b4, b5
            a[2, 0], a[2, 1], a[2, 2], b[2, 0], b[2, 1], b[2, 2] = a6, a7, a8, b6, b7, b8


@njit(fastmath=True, cache=True)
def convolve_rows(x, dy, dw, n):  # type: ignore[no-untyped-def]
    """Gradients (out, in, 9, n) of `convolve` in its weights, one for each image.

    The sums of all images do not fit in registers: they take in four columns at a time, to be loaded less often.
    Places in memory are unsigned, so that there is no test whether to count from the end.
    """
    channels, height, width, depth = dy.shape[0], dy.shape[1] - 2, dy.shape[2] // n - 2, x.shape[0]
    xs, slopes, sums, row = x.reshape(-1), dy.reshape(-1), dw.reshape(-1), (width + 2) * n
    m, m2, m3, m4, m5 = UINT(n), UINT(2 * n), UINT(3 * n), UINT(4 * n), UINT(5 * n)
    sums[:] = 0
    for h in range(height):
        for k in range(depth):
            for c in range(channels):
                for r in range(3):
                    a0 = UINT(((c * depth + k) * 9 + 3 * r) * n)
                    a1, a2 = a0 + m, a0 + m2
                    for w in range(0, width - 3, 4):
                        g0 = UINT((c * (height + 2) + h + 1) * row + (w + 1) * n)
                        g1, g2, g3 = g0 + m, g0 + m2, g0 + m3
                        x0 = UINT((k * (height + 2) + h + r) * row + w * n)
                        x1, x2, x3, x4, x5 = x0 + m, x0 + m2, x0 + m3, x0 + m4, x0 + m5
                        for t in range(m):
                            s0, s1, s2, s3 = slopes[g0 + t], slopes[g1 + t], slopes[g2 + t], slopes[g3 + t]
                            p1, p2, p3, p4 = xs[x1 + t], xs[x2 + t], xs[x3 + t], xs[x4 + t]
                            sums[a0 + t] += s0 * xs[x0 + t] + s1 * p1 + s2 * p2 + s3 * p3
                            sums[a1 + t] += s0 * p1 + s1 * p2 + s2 * p3 + s3 * p4
                            sums[a2 + t] += s0 * p2 + s1 * p3 + s2 * p4 + s3 * xs[x5 + t]
                    for w in range(width - width % 4, width):
                        g0 = UINT((c * (height + 2) + h + 1) * row + (w + 1) * n)
                        x0 = UINT((k * (height + 2) + h + r) * row + w * n)
                        x1, x2 = x0 + m, x0 + m2
                        for t in range(m):
                            s0 = slopes[g0 + t]
                            sums[a0 + t] += s0 * xs[x0 + t]
                            sums[a1 + t] += s0 * xs[x1 + t]
                            sums[a2 + t] += s0 * xs[x2 + t]


@njit(fastmath=True, cache=True)
def _pool_row(top, low, z, place, n):  # type: ignore[no-untyped-def]
    """Z = the largest of each 2x2 square of two rows, or 0; place: which of the four, 4 for none."""
    for w in range(place.shape[0] // n):
        u, v = slice(2 * w * n, (2 * w + 1) * n), slice((2 * w + 1) * n, (2 * w + 2) * n)
        y0, y1, y2, y3 = top[u], top[v], low[u], low[v]
        out, which = z[w * n :], place[w * n :]
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
def _unpool_row(g, place, top, low, n):  # type: ignore[no-untyped-def]
    """Gradient of `_pool_row` in its two rows."""
    for w in range(place.shape[0] // n):
        u, v = slice(2 * w * n, (2 * w + 1) * n), slice((2 * w + 1) * n, (2 * w + 2) * n)
        d0, d1, d2, d3, slope, which = top[u], top[v], low[u], low[v], g[w * n :], place[w * n :]
        for t in range(n):
            d0[t] = slope[t] if which[t] == 0 else F(0)
            d1[t] = slope[t] if which[t] == 1 else F(0)
            d2[t] = slope[t] if which[t] == 2 else F(0)
            d3[t] = slope[t] if which[t] == 3 else F(0)


@njit(fastmath=True, cache=True)
def convolve_pool(x, w, z, place, pair, n, border):  # type: ignore[no-untyped-def]
    """`convolve`, then the largest of each 2x2 square, or 0, into z at an offset of `border`.

    Two rows of two channels at a time, in `pair` (2, 2, W n): what is in between never leaves the cache.
    """
    channels, m = place.shape[0], pair.shape[2]
    y0, y1, z0, z1 = pair[0, 0], pair[0, 1], pair[1, 0], pair[1, 1]
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for h in range(place.shape[1]):
            pair[:] = 0
            for k in range(x.shape[0]):
                a, b = w[c, k], w[d, k]
                a0, a1, a2, a3, a4, a5, a6, a7, a8 = (
                    a[0, 0], a[0, 1], a[0, 2], a[1, 0], a[1, 1], a[1, 2], a[2, 0], a[2, 1], a[2, 2]
                )  # fmt: skip
                b0, b1, b2, b3, b4, b5, b6, b7, b8 = (
                    b[0, 0], b[0, 1], b[0, 2], b[1, 0], b[1, 1], b[1, 2], b[2, 0], b[2, 1], b[2, 2]
                )  # fmt: skip
                x0, x1, x2, x3, x4, x5, x6, x7, x8 = _shifted(x[k, 2 * h : 2 * h + 3], n, m)
                last = x[k, 2 * h + 3]
                x9, xa, xb = last[:m], last[n : n + m], last[2 * n :]
                for t in range(m):
                    p0, p1, p2, p3, p4, p5 = x0[t], x1[t], x2[t], x3[t], x4[t], x5[t]
                    p6, p7, p8, p9, pa, pb = x6[t], x7[t], x8[t], x9[t], xa[t], xb[t]
                    y0[t] += a0 * p0 + a1 * p1 + a2 * p2 + a3 * p3 + a4 * p4 + a5 * p5 + a6 * p6 + a7 * p7 + a8 * p8
                    y1[t] += a0 * p3 + a1 * p4 + a2 * p5 + a3 * p6 + a4 * p7 + a5 * p8 + a6 * p9 + a7 * pa + a8 * pb
                    z0[t] += b0 * p0 + b1 * p1 + b2 * p2 + b3 * p3 + b4 * p4 + b5 * p5 + b6 * p6 + b7 * p7 + b8 * p8
                    z1[t] += b0 * p3 + b1 * p4 + b2 * p5 + b3 * p6 + b4 * p7 + b5 * p8 + b6 * p9 + b7 * pa + b8 * pb
            _pool_row(y0, y1, z[c, h + border, border * n :], place[c, h], n)
            _pool_row(z0, z1, z[d, h + border, border * n :], place[d, h], n)


@njit(fastmath=True, cache=True)
def convolve_pool_gradient(x, dz, place, dw, pair, n):  # type: ignore[no-untyped-def]
    """Gradient (out, in, 3, 3) of `convolve_pool` in its weights, two rows of two channels at a time."""
    channels, m = place.shape[0], pair.shape[2]
    g0, g1, f0, f1 = pair[0, 0], pair[0, 1], pair[1, 0], pair[1, 1]
    dw[:] = 0
    pair[:] = 0  # an odd column at the end has no slope
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for h in range(place.shape[1]):
            _unpool_row(dz[c, h], place[c, h], g0, g1, n)
            _unpool_row(dz[d, h], place[d, h], f0, f1, n)
            for k in range(x.shape[0]):
                a0, a1, a2, a3, a4, a5, a6, a7, a8 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
                b0, b1, b2, b3, b4, b5, b6, b7, b8 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
                x0, x1, x2, x3, x4, x5, x6, x7, x8 = _shifted(x[k, 2 * h : 2 * h + 3], n, m)
                last = x[k, 2 * h + 3]
                x9, xa, xb = last[:m], last[n : n + m], last[2 * n :]
                for t in range(m):
                    p3, p4, p5, p6, p7, p8 = x3[t], x4[t], x5[t], x6[t], x7[t], x8[t]
                    s, r, u, v = g0[t], g1[t], f0[t], f1[t]
                    a0, a1, a2 = a0 + s * x0[t] + r * p3, a1 + s * x1[t] + r * p4, a2 + s * x2[t] + r * p5
                    a3, a4, a5 = a3 + s * p3 + r * p6, a4 + s * p4 + r * p7, a5 + s * p5 + r * p8
                    a6, a7, a8 = a6 + s * p6 + r * x9[t], a7 + s * p7 + r * xa[t], a8 + s * p8 + r * xb[t]
                    b0, b1, b2 = b0 + u * x0[t] + v * p3, b1 + u * x1[t] + v * p4, b2 + u * x2[t] + v * p5
                    b3, b4, b5 = b3 + u * p3 + v * p6, b4 + u * p4 + v * p7, b5 + u * p5 + v * p8
                    b6, b7, b8 = b6 + u * p6 + v * x9[t], b7 + u * p7 + v * xa[t], b8 + u * p8 + v * xb[t]
                _add(dw[c, k], (a0, a1, a2, a3, a4, a5, a6, a7, a8))
                if d > c:
                    _add(dw[d, k], (b0, b1, b2, b3, b4, b5, b6, b7, b8))


@njit(cache=True)
def _add(kernel, values):  # type: ignore[no-untyped-def]
    for i in range(3):
        for j in range(3):
            kernel[i, j] += values[3 * i + j]


@njit(cache=True)
def pool_gradient(dz, place, dy, n):  # type: ignore[no-untyped-def]
    """Gradient of pooling in its input, into the inside of dy, which has a border."""
    for c in range(place.shape[0]):
        for h in range(place.shape[1]):
            _unpool_row(dz[c, h], place[c, h], dy[c, 2 * h + 1, n:], dy[c, 2 * h + 2, n:], n)


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


@njit(cache=True)
def forward(x, index, rows, columns, weights, pooled, inputs, sums, places, pairs, n):  # type: ignore[no-untyped-def]
    """Run n images of x through all convolutions: `inputs[i]` is what goes into layer i, the last what comes out."""
    images_last(x, index, rows, columns, inputs[0])
    for i in range(len(weights)):
        border = 1 if i + 1 < len(weights) else 0
        if pooled[i]:
            convolve_pool(inputs[i], weights[i], inputs[i + 1], places[i], pairs[i], n, border)
        else:
            convolve(inputs[i], weights[i], sums[i], n)
            rectify(sums[i], inputs[i + 1], n, border)


@njit(cache=True)
def backward(above, weights, pooled, sums, places, slopes, input_slopes, lowest, n):  # type: ignore[no-untyped-def]
    """Slopes of the loss at the sums of convolutions from the last down to `lowest`, and at what goes into that.

    `above` is the slope at what comes out of the last one. What goes into the first is data, and has none.
    """
    for i in range(len(weights) - 1, lowest - 1, -1):
        if pooled[i]:
            pool_gradient(above, places[i], slopes[i], n)
        else:
            rectify_gradient(above, sums[i], slopes[i], n)
        if i:
            turned = np.ascontiguousarray(weights[i].transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
            convolve(slopes[i], turned, input_slopes[i], n)
            above = input_slopes[i]
    return above


@njit(cache=True)
def gradients(above, weights, pooled, inputs, sums, places, slopes, input_slopes, pairs, into, n):  # type: ignore[no-untyped-def]
    """Gradients of all convolutions in their weights."""
    lowest = 1 if pooled[0] else 0  # the slopes at the sums of the first layer are the largest: not all at once
    above = backward(above, weights, pooled, sums, places, slopes, input_slopes, lowest, n)
    if pooled[0]:
        convolve_pool_gradient(inputs[0], above, places[0], into[0], pairs[0], n)
    for i in range(lowest, len(into)):
        convolve_gradient(inputs[i], slopes[i], into[i], n)
