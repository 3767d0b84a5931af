"""Reports: results become DataFrames (`frames`), then figures (`figures`), then one HTML page (`html`)."""
