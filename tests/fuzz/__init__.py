"""Fuzzing of what strangers send: `make fuzz TARGET=... SECONDS=...`.

A target takes bytes and calls the product as its edge does. What it lets through are the named errors of that edge;
everything else is a finding, and so is an input that takes more than a second of CPU or 64 MiB. Inputs come from
libFuzzer (atheris), which is guided by the coverage of Weft's own modules. The first byte chooses between raw bytes and
a value that is built of the words of the target's examples (`fuzz.building`), since random bytes seldom pass a parser.

`corpus/TARGET/` has inputs that were findings once; the unit suite runs them, and the examples, without atheris.
"""
