"""The commands of ``python -m polyphase``, one file each.

They read arguments, call `polyphase.bench`, and show what comes back. torch is imported when a command runs and not
before, so that ``--help`` answers at once.
"""
