"""Tests of the decode ops: each sharding rule agrees with the op on simulated ranks."""
