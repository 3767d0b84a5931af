"""Results as pictures and tables: values -> frames (`frames`) -> figures (`figures`) -> one page (`html`)."""
