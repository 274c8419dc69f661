"""Push windows to the Hub and load them, also next to a model and offline."""

import os

from hf_longctx.windows import HeadWindows


windows = HeadWindows([[-1, 64], [32, 32]], sinks=2)
if os.environ.get("HF_HUB_OFFLINE") != "1":
    windows.push_to_hub("alice/windows")
assert HeadWindows.from_pretrained("alice/windows") == windows
assert HeadWindows.from_pretrained("alice/windows", revision="main", subfolder="") == windows
