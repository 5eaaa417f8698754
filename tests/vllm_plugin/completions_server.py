# SPDX-License-Identifier: Apache-2.0
"""A server that speaks vLLM's HTTP like vLLM and decodes nothing: what the scripts of ``scripts/`` are tried against.

Run as a program, in place of ``vllm serve``; its faults are chosen by FAULT: ``memory`` keeps a mebibyte of each
request, ``cancelled`` never lets go of a request whose client left, ``answers`` gives another answer after a while,
``crash`` kills the process with SIGSEGV at the third token of a prompt that holds token 666.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from aiohttp import web

FAULT = os.environ.get("FAULT", "")
kept: list[bytearray] = []
running: set[int] = set()
asked = 0


async def complete(request: web.Request) -> web.StreamResponse:
    global asked
    asked += 1
    body, name = await request.json(), asked
    if "messages" in body:
        body["prompt"] = body["messages"][0]["content"]
    if isinstance(body["prompt"], str):
        body["prompt"] = [len(body["prompt"])]
    running.add(name)
    if FAULT == "memory":
        kept.append(bytearray(os.urandom(1024) * 1024))
    tokens = [(sum(body["prompt"]) + index) % 1000 for index in range(body["max_tokens"])]
    if FAULT == "answers" and asked > 100:
        tokens[0] += 1
    usage = {"completion_tokens": len(tokens)}
    if not body.get("stream"):
        await asyncio.sleep(0.001)
        running.discard(name)
        return web.json_response({"choices": [{"token_ids": tokens}], "usage": usage})
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        for index, token in enumerate(tokens):
            if FAULT == "crash" and index == 2 and 666 in body["prompt"]:
                print("CUDA error: an illegal memory access was encountered", flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            event = {"choices": [{"token_ids": [token], "text": f"t{token} "}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.001)
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        running.discard(name)
    finally:
        if FAULT != "cancelled":
            running.discard(name)
    return response


async def metrics(request: web.Request) -> web.Response:
    gauges = {"num_requests_running": len(running), "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0}
    return web.Response(text="".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in gauges.items()))


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "model"}]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    if sys.argv[1] == "bench":  # vLLM's own client
        os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *sys.argv[1:]])
    if "--unknown" in sys.argv:
        sys.exit(2)
    app = web.Application()
    app.add_routes([web.post(f"/v1/{path}", complete) for path in ("completions", "chat/completions")])
    app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", models), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)
