def rotary_embedding(*_: object) -> None:
    raise AssertionError("never called")
