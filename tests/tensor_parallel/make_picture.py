"""Draw docs/llama_block.svg again: python -m tests.tensor_parallel.make_picture"""

from tests.tensor_parallel.test_draw import PICTURE, picture
from tests.world.world import Worlds

if __name__ == "__main__":
    worlds = Worlds("torch")
    try:
        PICTURE.write_text(worlds(4, 120.0).run(picture)[0])
    finally:
        worlds.close()
