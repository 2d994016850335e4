"""`python -m bench.sight PORT`: for each word on stdin, print when /metrics first contained it (monotonic clock)."""

import http.client
import sys
import time

PAUSE_SECONDS = 0.002
"""Between two looks: a page takes the agent some 0.2 ms, so that looking takes a tenth of its time."""


def main(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for line in sys.stdin.buffer:
        word = line.strip()
        while True:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read()
            if word in page:
                break
            time.sleep(PAUSE_SECONDS)
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
