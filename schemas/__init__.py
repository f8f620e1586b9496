"""The vocabulary that every part shares: ids, statuses, inputs, events, receipts, codec, topic plan, limits.

Records are values: frozen, and of values alone. They cannot be part of a cycle, so the collector is told not to look
at them (`gc=False`); there are very many, and looking at them cost a fifth of a decision.
"""
