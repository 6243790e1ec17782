"""One HTML page from the JSON of `gradlane bench` and `gradlane train`. It does not need torch."""
