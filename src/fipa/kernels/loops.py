r"""Convolutions with few channels, compiled for the processor by numba.

Libraries for convolutions fill vector registers with channels. The paper's CNNs have 4 to 48 of them, so most of a
register is empty. Here the images of a batch are innermost in memory, (channels, rows, columns, images), and registers
are filled with those: a row of an image's columns and all images of the batch is one long vector.

Inputs of convolutions carry a border of zeros, one pixel wide; columns and images share one axis.

The innermost loops take three neighbouring columns of one row of x, and what belongs to them in two rows of two output
channels: twelve products for seven loads, which is what sixteen registers can hold.
"""

from __future__ import annotations

import numpy as np
from numba import njit

F, INT, UINT = np.float32, np.int32, np.uint64


@njit(fastmath=True, cache=True)
def _add2(x, n, a, b, y, z):  # type: ignore[no-untyped-def]
    """Add to y and z (W n) the products of a row x ((W + 2) n) with one row of each kernel."""
    m = len(y)
    x0, x1, x2 = x[:m], x[n : n + m], x[2 * n : 2 * n + m]
    a0, a1, a2, b0, b1, b2 = a[0], a[1], a[2], b[0], b[1], b[2]
    for t in range(m):
        p0, p1, p2 = x0[t], x1[t], x2[t]
        y[t] += a0 * p0 + a1 * p1 + a2 * p2
        z[t] += b0 * p0 + b1 * p1 + b2 * p2


@njit(fastmath=True, cache=True)
def _add4(x, n, a, b, c, d, y0, z0, y1, z1):  # type: ignore[no-untyped-def]
    """The same for four rows of the output."""
    m = len(y0)
    x0, x1, x2 = x[:m], x[n : n + m], x[2 * n : 2 * n + m]
    a0, a1, a2, b0, b1, b2 = a[0], a[1], a[2], b[0], b[1], b[2]
    c0, c1, c2, d0, d1, d2 = c[0], c[1], c[2], d[0], d[1], d[2]
    for t in range(m):
        p0, p1, p2 = x0[t], x1[t], x2[t]
        y0[t] += a0 * p0 + a1 * p1 + a2 * p2
        z0[t] += b0 * p0 + b1 * p1 + b2 * p2
        y1[t] += c0 * p0 + c1 * p1 + c2 * p2
        z1[t] += d0 * p0 + d1 * p1 + d2 * p2


@njit(fastmath=True, cache=True)
def _sum2(x, n, g, f, a, b):  # type: ignore[no-untyped-def]
    """Add to one row of each kernel the products of a row x with the slopes g and f (W n)."""
    m = len(g)
    x0, x1, x2 = x[:m], x[n : n + m], x[2 * n : 2 * n + m]
    a0, a1, a2, b0, b1, b2 = F(0), F(0), F(0), F(0), F(0), F(0)
    for t in range(m):
        p0, p1, p2, s, u = x0[t], x1[t], x2[t], g[t], f[t]
        a0, a1, a2 = a0 + s * p0, a1 + s * p1, a2 + s * p2
        b0, b1, b2 = b0 + u * p0, b1 + u * p1, b2 + u * p2
    _into(a, a0, a1, a2)
    _into(b, b0, b1, b2)


@njit(fastmath=True, cache=True)
def _sum4(x, n, g0, f0, g1, f1, a, b, c, d):  # type: ignore[no-untyped-def]
    """The same for four rows of slopes."""
    m = len(g0)
    x0, x1, x2 = x[:m], x[n : n + m], x[2 * n : 2 * n + m]
    a0, a1, a2, b0, b1, b2 = F(0), F(0), F(0), F(0), F(0), F(0)
    c0, c1, c2, d0, d1, d2 = F(0), F(0), F(0), F(0), F(0), F(0)
    for t in range(m):
        p0, p1, p2, s, u, v, r = x0[t], x1[t], x2[t], g0[t], f0[t], g1[t], f1[t]
        a0, a1, a2 = a0 + s * p0, a1 + s * p1, a2 + s * p2
        b0, b1, b2 = b0 + u * p0, b1 + u * p1, b2 + u * p2
        c0, c1, c2 = c0 + v * p0, c1 + v * p1, c2 + v * p2
        d0, d1, d2 = d0 + r * p0, d1 + r * p1, d2 + r * p2
    _into(a, a0, a1, a2)
    _into(b, b0, b1, b2)
    _into(c, c0, c1, c2)
    _into(d, d0, d1, d2)


@njit(cache=True)
def _into(row, u, v, w):  # type: ignore[no-untyped-def]
    row[0] += u
    row[1] += v
    row[2] += w


@njit(fastmath=True, cache=True)
def _two_rows(x, w, c, d, h, n, y0, z0, y1, z1):  # type: ignore[no-untyped-def]
    """Rows h and h + 1 of the channels c (y) and d (z) of a convolution."""
    y0[:] = 0
    z0[:] = 0
    y1[:] = 0
    z1[:] = 0
    for k in range(x.shape[0]):
        a, b = w[c, k], w[d, k]
        _add2(x[k, h], n, a[0], b[0], y0, z0)
        _add4(x[k, h + 1], n, a[1], b[1], a[0], b[0], y0, z0, y1, z1)
        _add4(x[k, h + 2], n, a[2], b[2], a[1], b[1], y0, z0, y1, z1)
        _add2(x[k, h + 3], n, a[2], b[2], y1, z1)


@njit(fastmath=True, cache=True)
def _two_rows_gradient(x, dw, spare, c, d, h, n, g0, f0, g1, f1):  # type: ignore[no-untyped-def]
    """Add to dw the gradient of `_two_rows`, from the slopes of c (g) and d (f); `spare` is for c without a partner."""
    for k in range(x.shape[0]):
        a, b = dw[c, k], dw[d, k] if d > c else spare
        _sum2(x[k, h], n, g0, f0, a[0], b[0])
        _sum4(x[k, h + 1], n, g0, f0, g1, f1, a[1], b[1], a[0], b[0])
        _sum4(x[k, h + 2], n, g0, f0, g1, f1, a[2], b[2], a[1], b[1])
        _sum2(x[k, h + 3], n, g1, f1, a[2], b[2])


@njit(fastmath=True, cache=True)
def convolve(x, w, y, n):  # type: ignore[no-untyped-def]
    """Y (out, H, W n) = 3x3 convolution of x (in, H + 2, (W + 2) n) with w (out, in, 3, 3), for n images."""
    channels, height = y.shape[:2]
    spare = np.empty((2, y.shape[2]), F)
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)  # an odd one out is its own partner, and that one's sums go nowhere
        z = y[d] if d > c else spare
        for h in range(0, height - 1, 2):
            i = h if d > c else 0
            _two_rows(x, w, c, d, h, n, y[c, h], z[i], y[c, h + 1], z[i + 1])
        if height % 2:
            h = height - 1
            y0, z0 = y[c, h], z[h if d > c else 0]
            y0[:] = 0
            z0[:] = 0
            for k in range(x.shape[0]):
                for i in range(3):
                    _add2(x[k, h + i], n, w[c, k, i], w[d, k, i], y0, z0)


@njit(fastmath=True, cache=True)
def convolve_gradient(x, dy, dw, n):  # type: ignore[no-untyped-def]
    """Gradient (out, in, 3, 3) of `convolve` in its weights; dy has a border like x."""
    channels, height, m = dy.shape[0], dy.shape[1] - 2, dy.shape[2] - 2 * n
    spare = np.empty((3, 3), F)
    dw[:] = 0
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for h in range(0, height - 1, 2):
            g0, f0 = dy[c, h + 1, n : n + m], dy[d, h + 1, n : n + m]
            g1, f1 = dy[c, h + 2, n : n + m], dy[d, h + 2, n : n + m]
            _two_rows_gradient(x, dw, spare, c, d, h, n, g0, f0, g1, f1)
        if height % 2:
            g0, f0 = dy[c, height, n : n + m], dy[d, height, n : n + m]
            for k in range(x.shape[0]):
                for i in range(3):
                    _sum2(x[k, height - 1 + i], n, g0, f0, dw[c, k, i], dw[d, k, i] if d > c else spare[i])


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
    channels = place.shape[0]
    y0, y1, z0, z1 = pair[0, 0], pair[0, 1], pair[1, 0], pair[1, 1]
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for h in range(place.shape[1]):
            _two_rows(x, w, c, d, 2 * h, n, y0, z0, y1, z1)
            _pool_row(y0, y1, z[c, h + border, border * n :], place[c, h], n)
            _pool_row(z0, z1, z[d, h + border, border * n :], place[d, h], n)


@njit(fastmath=True, cache=True)
def convolve_pool_gradient(x, dz, place, dw, pair, n):  # type: ignore[no-untyped-def]
    """Gradient (out, in, 3, 3) of `convolve_pool` in its weights, two rows of two channels at a time."""
    channels = place.shape[0]
    g0, g1, f0, f1 = pair[0, 0], pair[0, 1], pair[1, 0], pair[1, 1]
    spare = np.empty((3, 3), F)
    dw[:] = 0
    pair[:] = 0  # an odd column at the end has no slope
    for c in range(0, channels, 2):
        d = min(c + 1, channels - 1)
        for h in range(place.shape[1]):
            _unpool_row(dz[c, h], place[c, h], g0, g1, n)
            _unpool_row(dz[d, h], place[d, h], f0, f1, n)
            _two_rows_gradient(x, dw, spare, c, d, 2 * h, n, g0, f0, g1, f1)


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


@njit(cache=True)
def images_last(x, index, moves, z):  # type: ignore[no-untyped-def]
    """The inside of z (channels, H + 2, (W + 2) n) = n images of x (all, H, W, channels).

    Image t shows x[index[t]], shifted and mirrored by moves[t]. Beyond the edge, the nearest pixel is repeated. A row
    of one image is read at a time: the same row of many images can lie in memory so that each drives the others out of
    the cache.
    """
    n, (_, height, width, channels) = len(index), x.shape
    pixels, inside, m, along = x.reshape(-1), z.reshape(-1), UINT(n), np.empty((n, width), np.int64)
    for t in range(n):
        for w in range(width):
            column = min(max(w + moves[t, 1], 0), width - 1)
            along[t, w] = (width - 1 - column if moves[t, 2] else column) * channels
    for h in range(height):
        for t in range(n):
            begin = UINT((index[t] * height + min(max(h + moves[t, 0], 0), height - 1)) * width * channels)
            for c in range(channels):
                first = UINT((c * z.shape[1] + h + 1) * z.shape[2] + n + t)
                for w in range(width):
                    inside[first + UINT(w) * m] = pixels[begin + UINT(along[t, w] + c)]


@njit(cache=True)
def forward(x, index, moves, weights, pooled, inputs, sums, places, pairs, n):  # type: ignore[no-untyped-def]
    """Run n images of x through all convolutions: `inputs[i]` is what goes into layer i, the last what comes out."""
    images_last(x, index, moves, inputs[0])
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
