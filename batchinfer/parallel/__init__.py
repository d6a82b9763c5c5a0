"""Moving rows between ranks: token rows go to the ranks that hold their experts and come back.

In: rows, their chosen experts and the weights of these experts. Out: rows sorted for the local experts, then
the weighted sums. dispatch.py holds the interface and the version for one rank, the oracle of every other version.
"""
