"""An external engine: an HTTP server that records the versions it is notified of."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from millrace.weights.transports.disk import MARKER


class HttpEngine:
    """`answers`: status codes to give in turn; after them 200. Answers wait for `may_answer`."""

    def __init__(self, answers: tuple[int, ...] = ()) -> None:
        self.versions: list[int] = []  # of all posts, in order
        self.had_marker: list[bool] = []  # when it was notified
        self.may_answer = threading.Event()
        self.may_answer.set()
        codes, engine = [*answers], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.had_marker.append((Path(body["path"]) / MARKER).is_file())
                engine.versions.append(body["version"])
                assert engine.may_answer.wait(20)
                self.send_response(codes.pop(0) if codes else 200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Be quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/weights?run=1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "HttpEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
