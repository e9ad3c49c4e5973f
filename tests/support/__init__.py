"""Stand-ins, components and data that tests share.

from support.groups import make_group      # tests/ is on the path, in tests and in the processes that they start
"""
