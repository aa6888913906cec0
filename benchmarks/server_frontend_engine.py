"""The engine process of server_frontend.py: the server's parent starts it with `python -m`."""

from server_frontend import engine_main

if __name__ == "__main__":
    engine_main()
