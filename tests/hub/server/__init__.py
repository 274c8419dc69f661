"""A Hub of one's own: the part of the Hub's HTTP interface that Hugging Face's clients use, for tests.

    with serve(folder) as hub:
        run_a_client(HF_ENDPOINT=hub.url, HF_HOME=an_empty_folder, HF_TOKEN="hf_of_alice")

The clients run unmodified, in processes of their own, because they read these variables when they are imported. The
server speaks LFS and not Xet: HF_HUB_DISABLE_XET=1.
"""

import contextlib
import socket
import threading
import time

import uvicorn

from . import files, repos  # noqa: F401 (they register endpoints)
from .app import Hub, User, application


USERS = {
    "hf_of_alice": User("alice", "write"),
    "hf_of_bob": User("bob", "write"),
    "hf_alice_reads": User("alice", "read"),
}


@contextlib.contextmanager
def serve(folder, bound=None):
    """Run the server in a thread.

    Blobs have an address of another host, 127.0.0.2: clients drop a token where the host changes, whatever the port.

    Args:
        folder: an empty folder, for the blobs.
        bound: a socket with the address of the Hub, by default a new one.

    Yields:
        the `Hub`; its `knobs` can be turned at any time.
    """
    hub = Hub(folder, tokens=dict(USERS))
    sockets = [bound or socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.2", 0))]
    for listening in sockets:  # an answer goes out in two pieces, and the second must not wait for an acknowledgement
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hub.url, hub.blob_url = ("http://{}:{}".format(*s.getsockname()) for s in sockets)
    server = uvicorn.Server(
        uvicorn.Config(application(hub), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join(10)
