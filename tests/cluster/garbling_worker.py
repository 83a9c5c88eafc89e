"""A worker for tests that breaks the rules of the wire before it answers its one call."""

import os
import sys

import zmq

from millrace.cluster.address import Credentials
from millrace.cluster.link import EVENT_ID, identity_of
from millrace.cluster.messages import Done, Hello
from millrace.cluster.wire import encode

name, address = sys.argv[2], sys.argv[4]
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    token = Credentials.take(os.environ).token
    socket.setsockopt(zmq.ROUTING_ID, identity_of(name, token=token))
    socket.connect(address)
    for frames in (
        [b"one frame"],
        [EVENT_ID, b"\xff\xff\xff"],
        [EVENT_ID, *encode(Done()), b"stowaway"],
        [b"no call id", b"\x93\x01\x02"],
    ):
        socket.send_multipart(frames)
    socket.send_multipart([EVENT_ID, *encode(Hello(worker=name, pid=os.getpid()))])
    call_id, *_ = socket.recv_multipart()
    socket.send_multipart([b"\x01" * 8, *encode(Done())])  # a reply to no call
    socket.send_multipart([call_id, *encode(Done())])
    socket.recv()
