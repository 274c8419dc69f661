"""Windows are pushed and loaded, also offline."""


def test_windows_on_the_hub(hub, run_client):
    run_client("windows.py", package=True)
    assert hub.repos[("model", "alice/windows")]
    run_client("windows.py", package=True, HF_HUB_OFFLINE="1")
