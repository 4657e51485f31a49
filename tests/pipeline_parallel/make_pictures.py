"""Draw the pictures of docs/pipeline.md again: python -m tests.pipeline_parallel.make_pictures"""

from tests.pipeline_parallel.test_show import DOCS, PICTURES, picture

if __name__ == "__main__":
    for file, name in PICTURES.items():
        (DOCS / file).write_text(picture(name))
