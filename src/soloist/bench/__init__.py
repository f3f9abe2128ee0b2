"""Measurements that can be trusted: conditions beside every number, rivals on the same weights."""
