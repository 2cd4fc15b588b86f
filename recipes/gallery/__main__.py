"""``python -m recipes.gallery`` draws the README's pictures anew."""

from recipes.gallery.pictures import draw

if __name__ == "__main__":
    draw()
