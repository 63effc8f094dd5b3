"""Tests of the ops: each sharding rule agrees with the op on simulated ranks."""
