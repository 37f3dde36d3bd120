from array import array

SUPPORTED: bool

def attend(
    places: array[int],
    shelves: array[int],
    query: tuple[int, int, int],
    key: tuple[int, int, int],
    value: tuple[int, int, int],
    output: tuple[int, int, int],
    shape: tuple[int, int, int, int],
    is_bfloat16: bool,
    scale: float,
    first: int,
    end: int,
    /,
) -> None: ...
