"""What servers are told of who asks."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from coat_data.media.remote_media import fetched
from coat_data.sample import Media


def test_requests_say_who_asks() -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("User-Agent"))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.jpg"
        assert fetched(Media(kind="image", path=url)).data == b"ok"
        server.shutdown()
    assert asked == [f"coat-vlm/{version('coat-vlm')}"]
