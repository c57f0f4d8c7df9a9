"""What wandb needs of its server to record a run, for tests: `wandb_server.py LOG` prints its port and serves.

LOG gets a JSON list a request: [GraphQL operation, its variables], and ["history", {offset, content}] for rows.
"""

import gzip
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ME = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
runs: dict[str, dict] = {}  # by name


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict = {}
        if self.path == "/graphql":
            query = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])[1]
            variables = query.get("variables") or {}
            log(name, variables)
            answer = graphql(name, variables)
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if sent:
                log("history", sent)
                run = runs[self.path.split("/")[-2]]
                run["historyLineCount"] = sent["offset"] + len(sent["content"])
                run["historyTail"] = json.dumps(sent["content"][-1:])
        self.reply(answer)

    do_GET = do_PUT = do_POST

    def reply(self, answer: dict) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def graphql(name: str, variables: dict) -> dict:
    if name == "Viewer":
        return {"data": {"viewer": ME}}
    if name == "RunResumeStatus":
        project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "me"}}
        return {"data": {"model": project | {"bucket": runs.get(variables["name"])}}}
    if name == "UpsertBucket":
        project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "me"}}
        run = runs.setdefault(variables["name"], {
            "id": "1", "name": variables["name"], "displayName": variables["displayName"], "summaryMetrics": "{}",
            "historyLineCount": 0, "eventsLineCount": 0, "logLineCount": 0, "historyTail": "[]", "eventsTail": "[]",
            "config": "{}", "tags": [], "wandbConfig": '{"t": 1}', "project": project, "sweepName": None,
        })
        return {"data": {"upsertBucket": {"bucket": run, "inserted": True}}}
    return {"errors": [{"message": f"{name}: not known here"}]}


def log(name: str, content: dict) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([name, content]) + "\n")


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
