# SPDX-License-Identifier: Apache-2.0
"""The quadratures of :mod:`pyro_dvi.moments.smooth` as one kernel on a GPU.

In torch, both quadratures run on all elements, and values at all nodes are written to memory. The kernel chooses one of
them for each element, and adds up the terms in registers. Its steps are those of ``Smooth.around``.
"""

from string import Template
from typing import TYPE_CHECKING, Any

from pyro_dvi.core.elementwise import Elementwise
from pyro_dvi.moments.quadrature import DENSITY, ROOT_HALF

if TYPE_CHECKING:
    from pyro_dvi.moments.smooth import Smooth

_ARRAYS = ("nodes", "weights", "places", "rest", "rest_of_square")
_BODY = Template("""
    $arrays
    T side = mu > 0 ? T(-1) : T(1), y = mu * side, sigma = sqrt(variance), x = y, f, slope, third;
    $value
    T centre = f;
    if (variance <= T($limit)) {
        T d0 = 0, d1 = 0, s0 = 0, s1 = 0, s2 = 0, e0 = 0, e1 = 0;
        for (int k = 0; k < (wide ? $near8 : $near4); k++) {
            x = y + sigma * nodes[k];
            $value
            T d = f - centre, wd = weights[k] * d, ws = weights[k] * slope, wsz = ws * nodes[k];
            d0 += wd; d1 += wd * d; s0 += ws; s1 += wsz; s2 += wsz * nodes[k]; e0 += ws * d; e1 += wsz * d;
        }
        third = s2 - s0;
        bool tiny = variance < (wide ? T($series8) : T($series4));
        shift = tiny ? T(0.5) * sigma * s1 : d0;
        spread = tiny ? variance * (s0 * s0 + T(0.5) * s1 * s1 + third * third / 6) : d1 - d0 * d0;
        by_mu = s0; by_v = T(0.5) * s1 / sigma;
        spread_by_mu = tiny ? sigma * s1 * (2 * s0 + third) : 2 * (e0 - d0 * s0);
        spread_by_v = tiny ? s0 * (s0 + third) + s1 * s1 : (e1 - d0 * s1) / sigma;
        third /= variance;
    } else {
        T inverse = rsqrt(variance), reach = wide ? T($reach8) : T($reach4), F[4] = {0, 0, 0, 0}, Q[3] = {0, 0, 0};
        for (int k = 0; k < (wide ? $far8 : $far4); k++) {
            T u = (places[k] - y) * inverse;
            u = u < -reach ? -reach : u > reach ? reach : u;
            T density = exp(T(-0.5) * u * u) * inverse, r = rest[k] * density, q = rest_of_square[k] * density;
            u *= inverse;
            F[0] += r; F[1] += r * u; F[2] += r * u * u; F[3] += r * u * u * u;
            Q[0] += q; Q[1] += q * u; Q[2] += q * u * u;
        }
        F[3] -= 3 * F[1] / variance; F[2] -= F[0] / variance; Q[2] -= Q[0] / variance;
        T c = 1 / (variance + T($square)), root = sqrt(c), z = y * root, share = T($square) * c;
        T p = exp(T(-0.5) * z * z) * root * T($density), cdf = T(0.5) * erfc(z * T(-$half));
        T b = 1 + share * (1 - z * z), step[4] = {cdf, p, -z * root * p, (z * z - 1) * p * c};
        T ramp[4] = {y * cdf + variance * p, cdf + share * y * p, b * p, -(b + 2 * share) * z * root * p};
        for (int k = 0; k < 4; k++) {
            F[k] += $ramp ? ramp[k] : step[k];
            if (k < 3) Q[k] += $ramp ? y * ramp[k] + variance * ramp[k + 1] + (k ? k * ramp[k - 1] : T(0)) : step[k];
        }
        shift = F[0] - centre; by_mu = F[1]; by_v = T(0.5) * F[2]; third = F[3];
        spread = Q[0] - F[0] * F[0];
        spread_by_mu = Q[1] - 2 * F[0] * F[1]; spread_by_v = T(0.5) * Q[2] - F[0] * F[2];
    }
    T right = $ramp && mu > 0 ? T(1) : T(0), excess = (1 - 2 * by_mu) * right;
    shift *= $ramp ? T(1) : side; spread += variance * excess; by_mu += excess;
    spread_by_mu = spread_by_mu * side + 4 * right * variance * by_v;
    spread_by_v += excess - right * variance * third;
    by_v *= $ramp ? T(1) : side;
""")


def smooth_kernel(function: "Smooth") -> Elementwise:
    """Return a kernel that computes what ``function.around`` computes with slopes."""
    numbers: dict[str, Any] = {"limit": function._tables[0].limit, "square": function.smoothing**2}
    numbers.update(value=function.in_cpp, ramp=str(function.ramp).lower(), density=DENSITY, half=ROOT_HALF)
    arrays = "bool wide = sizeof(T) == 8;"
    for bits, kind, table in zip((8, 4), ("double", "float"), function._tables, strict=True):
        columns = (*table.nodes, table.lattice[0], *table.lattice[1])
        for name, column in zip(_ARRAYS, columns, strict=True):
            arrays += (
                f"static const {kind} {name}{bits}[] = {{{', '.join(str(value) for (value,) in column)}}};"
            )
        counts = (len(columns[0]), len(columns[2]), table.series, table.reach)
        numbers.update(
            zip((f"near{bits}", f"far{bits}", f"series{bits}", f"reach{bits}"), counts, strict=True)
        )
    arrays += "".join(f"const T* {name} = wide ? (const T*){name}8 : (const T*){name}4;" for name in _ARRAYS)
    return Elementwise(
        f"moments_of{function.value_and_slope.__name__}",
        "shift, spread, by_mu, by_v, spread_by_mu, spread_by_v",
        _BODY.substitute(numbers, arrays=arrays),
        lambda mu, variance: tuple(function._around(mu, variance, True)),
    )
