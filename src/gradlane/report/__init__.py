"""One HTML page from the JSON of `gradlane bench` and `gradlane train`. Needs no torch."""
