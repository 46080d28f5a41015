"""What suits a text, a time or a budget: the flags that --text, --demo and --minutes set, and --plan.

May import `support.runtime`, `support.data` and what they may import.
"""
