"""The simulator: the shipped machines on one virtual clock, through the codec's bytes.

Network, disk and model execution are models; gateway, scheduler, supervisor, runner and predictor are the code that
ships. One seed gives one run: `clock` orders simultaneous events, `streams_of` derives every random stream from the
seed, and nothing iterates over a set.
"""
