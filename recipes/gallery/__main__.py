"""``python -m recipes.gallery`` draws the pages' timelines again."""

from recipes.gallery.pictures import draw

if __name__ == "__main__":
    draw()
