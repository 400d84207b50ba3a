#!/usr/bin/env python3
"""Prints the golden values of permutation_test.cpp, computed from the C++ standard's text alone ([rand.util.seedseq],
[rand.eng.mers]): a second implementation, which shares nothing with the library or with any C++ standard library."""

M32, M64 = 2**32 - 1, 2**64 - 1


def seed_sequence(words, n):
    """seed_seq{words}.generate: n words of 32 bits."""
    s = len(words)
    b = [0x8B8B8B8B] * n
    t = 11 if n >= 623 else 7 if n >= 68 else 5 if n >= 39 else 3 if n >= 7 else (n - 1) // 2
    p = (n - t) // 2
    q = p + t
    m = max(s + 1, n)

    def mix(x):
        return x ^ (x >> 27)

    for k in range(m):
        r1 = 1664525 * mix(b[k % n] ^ b[(k + p) % n] ^ b[(k - 1) % n]) & M32
        r2 = r1 + (s if k == 0 else k % n + words[k - 1] if k <= s else k % n) & M32
        b[(k + p) % n] = b[(k + p) % n] + r1 & M32
        b[(k + q) % n] = b[(k + q) % n] + r2 & M32
        b[k % n] = r2
    for k in range(m, m + n):
        r3 = 1566083941 * mix(b[k % n] + b[(k + p) % n] + b[(k - 1) % n] & M32) & M32
        r4 = r3 - k % n & M32
        b[(k + p) % n] ^= r3
        b[(k + q) % n] ^= r4
        b[k % n] = r4
    return b


def mt19937_64(words):
    half = seed_sequence(words, 624)
    x = [half[2 * i] | half[2 * i + 1] << 32 for i in range(312)]
    if x[0] >> 31 == 0 and not any(x[1:]):
        x[0] = 2**63
    while True:
        for i in range(312):
            y = (x[i] & ~(2**31 - 1) & M64) | (x[(i + 1) % 312] & (2**31 - 1))
            x[i] = x[(i + 156) % 312] ^ (y >> 1) ^ (0xB5026F5AA96619E9 if y & 1 else 0)
            z = x[i]
            z ^= (z >> 29) & 0x5555555555555555
            z ^= (z << 17) & 0x71D67FFFEDA60000
            z ^= (z << 37) & 0xFFF7EEE000000000
            yield z ^ (z >> 43)


def permutation(size, seed, number):
    draws = mt19937_64([seed & M32, seed >> 32, number & M32, number >> 32])
    out = list(range(size))
    for left in range(size, 1, -1):
        value = next(v for v in draws if v >= 2**64 % left)
        i = value % left
        out[left - 1], out[i] = out[i], out[left - 1]
    return out


for size, seed, number in [(10, 0, 0), (10, 0, 1), (10, 7, 0), (10, 0xFEDCBA9876543210, 0x123456789)]:
    values = ", ".join(map(str, permutation(size, seed, number)))
    print(f"CHECK(permutation({size}, {seed:#x}, {number:#x}) == Values{{{values}}});")
