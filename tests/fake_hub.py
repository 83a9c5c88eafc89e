"""A stand-in for the Hugging Face hub: the HTTP API that huggingface_hub 2.4 uses to create a model
repository, to ask for a file, and to commit files, large ones through git-lfs."""

import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

TOKEN = "hf_secret"
LARGE_FILES = (".safetensors", ".bin")


class FakeHub:
    def __init__(self, *, refuses: int | None = None) -> None:
        """`refuses`: the status of all answers about writing."""
        self.files: dict[str, bytes] = {}  # of the repository
        self.repo: dict[str, Any] = {}  # how it was created
        self.messages: list[str] = []  # of commits
        self._objects: dict[str, bytes] = {}  # of git-lfs, by sha256
        self._refuses = refuses
        self.url = ""

    async def _create(self, request: web.Request) -> web.Response:
        if self._refuses is not None:
            message = "You don't have the rights to create a model under this namespace"
            return web.json_response({"error": message}, status=self._refuses)
        status, self.repo = (409, self.repo) if self.repo else (200, await request.json())
        name = f"{self.repo['organization']}/{self.repo['name']}"
        return web.json_response({"url": f"{self.url}/{name}", "name": name}, status=status)

    async def _resolve(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.files:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha1(self.files[name]).hexdigest()
        size = str(len(self.files[name]))
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": digest, "X-Linked-Size": size}
        return web.Response(headers=headers)

    async def _preupload(self, request: web.Request) -> web.Response:
        files = [file["path"] for file in (await request.json())["files"]]
        modes = ["lfs" if name.endswith(LARGE_FILES) else "regular" for name in files]
        rows = [
            {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
            for path, mode in zip(files, modes, strict=True)
        ]
        return web.json_response({"files": rows})

    async def _lfs_batch(self, request: web.Request) -> web.Response:
        body = await request.json()
        objects = [
            {**row, "actions": {"upload": {"href": f"{self.url}/objects/{row['oid']}"}}}
            for row in body["objects"]
        ]
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _store(self, request: web.Request) -> web.Response:
        data = await request.read()
        assert hashlib.sha256(data).hexdigest() == request.match_info["oid"]
        self._objects[request.match_info["oid"]] = data
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        for line in (await request.text()).splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                self.messages.append(value["summary"])
            elif row["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[value["path"]] = self._objects[value["oid"]]
        oid = "0" * 40
        url = f"{self.url}/{request.match_info['repo']}/commit/{oid}"
        return web.json_response({"success": True, "commitOid": oid, "commitUrl": url})

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        is_storage = request.path.startswith("/objects/")  # another host, which gets no token
        if not is_storage and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        return await handler(request)

    async def _validate(self, _request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(middlewares=[self._check_token], client_max_size=2**30)
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/validate-yaml", self._validate)
        app.router.add_post("/api/models/{repo:.+}/preupload/main", self._preupload)
        app.router.add_post("/api/models/{repo:.+}/commit/main", self._commit)
        app.router.add_post("/{repo:.+}.git/info/lfs/objects/batch", self._lfs_batch)
        app.router.add_put("/objects/{oid}", self._store)
        app.router.add_get("/{repo:.+}/resolve/main/{name}", self._resolve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self.url
        finally:
            await runner.cleanup()
