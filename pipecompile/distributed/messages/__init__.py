"""Values between ranks: their messages, over gloo or from GPU to GPU. Open `value_transport.py` first.

mailboxes, layout_announcements    a message of gloo: its tag, its credit, and the layout that is sent once
direct_links, direct_values        a message from GPU to GPU, on streams of its own
"""
