"""The global prefix plan: the order of requests in which each distinct prefix is computed once.

in_memory.py is the algorithm; streamed.py gives the same plan in bounded memory, over sorted runs on disk.
"""

from batchinfer.plan.prefix.in_memory import PrefixPlan, plan_prefixes

__all__ = ["PrefixPlan", "plan_prefixes"]
